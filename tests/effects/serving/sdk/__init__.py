"""What other people's clients do with a server: a table of cases for each of them."""
