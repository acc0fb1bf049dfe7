"""gin configurations shipped with the package."""
