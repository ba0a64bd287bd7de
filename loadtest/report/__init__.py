"""Shows measures as text, tables, plots and pages. Imports loadtest/analysis."""
