"""Make, apply, predict and prove an activation plan; torch is all that is needed beside numpy and psutil."""
