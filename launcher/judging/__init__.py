"""What went wrong and whose fault it is: pure decisions on facts, and the words for them."""
