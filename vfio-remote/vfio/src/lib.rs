//! Physical functions through VFIO.
