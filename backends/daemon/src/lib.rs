//! What every backend daemon shares.
