"""Measures Causeway beside other tunnels: who starts them, who calls them, and what the figures say."""
