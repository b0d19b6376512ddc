"""The processes of a server: which there are, how they are started, watched and ended."""
