"""Recommending from an export, with numpy and onnxruntime alone: nothing here imports torch."""
