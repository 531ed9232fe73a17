//! A software GPU: video memory, a copy engine and a small compute engine.
