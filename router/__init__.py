"""HTTP in, decision, dispatch, streaming out, metrics. No torch, no SGLang."""
