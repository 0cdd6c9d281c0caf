"""Files that others give: models and clusters that users describe, recorded routing, what a job's ranks have written."""
