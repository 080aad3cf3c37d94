"""From public packages to prompts: sources, recipes, splits, templates and data contracts."""
