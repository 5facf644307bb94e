"""Personalized federated fine-tuning: one pretrained model, fitted to every client."""
