"""Episodes of several turns: environments, tools, and the model's turns, exact to the token."""
