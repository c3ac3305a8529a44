"""What is kept beside the core state for those who ask: further rows, each family in a file of its own."""
