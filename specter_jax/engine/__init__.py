"""The orchestrator: expert transfers, drafting, verification, prefill and the decoding loop."""
