"""Evaluation: samples of a task, and scores of what was answered. No model is needed here."""
