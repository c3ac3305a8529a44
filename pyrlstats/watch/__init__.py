"""Looking at recorded runs: in the terminal, as a page, against rules and against each other."""
