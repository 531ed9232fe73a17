//! Small programs that the kernel runs for a port.
