//! Interrupts on their way out: MSI-X vectors.

use crate::counters::{Counters, count};
use farlane_abi::gpu::VECTORS;
use farlane_pci::{AccessError, InterruptKind, Signal};
use farlane_sys::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Debug, Default)]
struct Vector {
    signal: Mutex<Option<Arc<dyn Signal>>>,
    /// Raised while it went nowhere.
    pending: AtomicBool,
}

/// All interrupts of a function.
#[derive(Debug)]
pub struct Interrupts {
    vectors: [Vector; VECTORS as usize],
    counters: Arc<Counters>,
}

impl Interrupts {
    /// All go nowhere.
    pub fn new(counters: Arc<Counters>) -> Self {
        Self {
            vectors: Default::default(),
            counters,
        }
    }

    /// Connects or disconnects one.
    pub fn set(
        &self,
        kind: InterruptKind,
        vector: u16,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        let slot = self
            .vectors
            .get(usize::from(vector))
            .filter(|_| kind == InterruptKind::Msix)
            .ok_or(AccessError::Interrupt { kind, vector })?;
        let mut current = lock(&slot.signal);
        *current = signal;
        if let Some(signal) = &*current
            && slot.pending.swap(false, Ordering::SeqCst)
        {
            signal.raise();
            count(&self.counters.interrupts, 1);
        }
        Ok(())
    }

    /// Raises a vector.
    pub fn raise(&self, vector: u16) {
        let Some(slot) = self.vectors.get(usize::from(vector)) else {
            return;
        };
        let signal = lock(&slot.signal);
        if let Some(signal) = &*signal {
            signal.raise();
            count(&self.counters.interrupts, 1);
        } else {
            slot.pending.store(true, Ordering::SeqCst);
        }
    }

    /// Forgets what was raised while it went nowhere.
    pub fn clear_pending(&self) {
        for vector in &self.vectors {
            vector.pending.store(false, Ordering::SeqCst);
        }
    }

    /// The pending bits (PCI 3.0, 6.8.2.7).
    pub fn pending_bits(&self) -> u8 {
        let bit = |v: &Vector| u8::from(v.pending.load(Ordering::SeqCst));
        self.vectors
            .iter()
            .rev()
            .fold(0, |bits, v| bits << 1 | bit(v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[derive(Debug, Default)]
    struct Raised(AtomicU32);

    impl Signal for Raised {
        fn raise(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_was_raised_without_a_listener_is_raised_when_there_is_one() {
        let interrupts = Interrupts::new(Arc::default());
        let raised = Arc::new(Raised::default());
        interrupts.raise(1);
        assert_eq!(interrupts.pending_bits(), 2);
        interrupts
            .set(InterruptKind::Msix, 1, Some(raised.clone()))
            .unwrap();
        assert_eq!(interrupts.pending_bits(), 0);
        interrupts.raise(1);
        interrupts.raise(0);
        interrupts.clear_pending();
        assert_eq!(interrupts.pending_bits(), 0);
        assert_eq!(raised.0.load(Ordering::SeqCst), 2);
        assert!(interrupts.set(InterruptKind::Msix, 2, None).is_err());
        assert!(interrupts.set(InterruptKind::Intx, 0, None).is_err());
    }
}
