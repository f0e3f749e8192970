"""Predicts time per token, best depth and hit rate for hardware that one does not have.

`cards` and `calibration` say what hardware does, `timing` what a piece of work takes on it,
`replay` runs the engine on that clock with routing from `traces`, `predict` tabulates budgets and
depths and compares predictions with measurements. Everything here is predicted, never measured.
"""
