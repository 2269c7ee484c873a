"""What a keeper does once it has forked its rank; the rank loads none of this."""
