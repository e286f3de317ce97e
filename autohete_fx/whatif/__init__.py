"""Plans without the model's weights or its machine: architectures, blueprints, predictions and their reports."""
