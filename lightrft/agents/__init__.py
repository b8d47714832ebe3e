"""Episodes of several turns: environments, tools, and the model's turns in them, exact to the
token.
"""
