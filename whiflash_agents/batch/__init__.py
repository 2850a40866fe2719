"""What a run is: its rows, their order, the output rows, the figures."""
