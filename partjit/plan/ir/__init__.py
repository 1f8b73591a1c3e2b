"""The data of a plan: what there is between its passes."""
