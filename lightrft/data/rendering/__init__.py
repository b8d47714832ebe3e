"""From the messages of a row, an agent or a client to text and tokens: one way for all of them."""
