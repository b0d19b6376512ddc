"""Everything that touches the world: execution, files, text, the command line."""
