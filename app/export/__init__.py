"""Export to ONNX: the graph, its quantisation, its check against torch, its model card."""
