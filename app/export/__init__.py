"""Export to ONNX: graph, quantisation, parity with torch, model card."""
