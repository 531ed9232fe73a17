//! Configuration space as a virtual machine sees it.
