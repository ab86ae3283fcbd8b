"""Makes the small MoE that ships in ops/demo_model: its data, tokenizer, model, training and evaluation."""
