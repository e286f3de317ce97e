"""From AOTAutograd's hand-off to blocks: what the graph's inputs are, and which nodes form a layer."""
