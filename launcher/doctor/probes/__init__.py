"""What is asked in processes of their own, because the libraries that are loaded there may crash, hang or be broken."""
