"""PyTorch's private parts, of which nobody else imports any: Dynamo's hooks, Inductor's, and what differs between versions."""
