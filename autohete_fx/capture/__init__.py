"""From AOTAutograd's hand-off to blocks: what stands behind the graph's inputs, and which nodes form a layer."""
