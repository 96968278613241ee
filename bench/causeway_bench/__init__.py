"""Measures Causeway beside other tunnels: starts them, loads them, and reports the figures."""
