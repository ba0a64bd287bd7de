"""What the experiments share: settings, texts, models, cached results, training runs, records."""
