"""A training job: ranks meet, take their parts of a plan, train, sum gradients, and leave."""
