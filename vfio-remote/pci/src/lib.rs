//! What a PCI function is.
