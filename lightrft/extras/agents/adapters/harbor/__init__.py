"""Tasks of Harbor as episodes. Harbor is a program of its own, with its own interpreter."""
