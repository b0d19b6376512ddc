"""What abuse of a server costs its neighbours: `python -m bench.abuse`."""
