"""Commands about runs that have ended, and about what goes into them and comes out of them."""
