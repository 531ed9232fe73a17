//! What was tried, and what it got.

use farlane_abi::Errno;

/// The attempts so far. Each is a line of output: `group: what -> outcome`, with `BAD` in front of
/// what must not be.
#[derive(Debug, Default)]
pub struct Table {
    attempts: u64,
    bad: u64,
}

impl Table {
    /// An attempt that must fail with one of `wanted`.
    pub fn refused(
        &mut self,
        group: &str,
        what: &str,
        outcome: Result<(), Errno>,
        wanted: &[Errno],
    ) {
        let said = match outcome {
            Ok(()) => "nothing against it".to_owned(),
            Err(errno) => errno_name(errno),
        };
        let good = outcome.is_err_and(|errno| wanted.contains(&errno));
        self.note(group, what, &said, good);
    }

    /// An attempt that got `said`, which is right or not.
    pub fn note(&mut self, group: &str, what: &str, said: &str, good: bool) {
        self.many(group, what, 1, said, good);
    }

    /// As [`note`](Self::note), for `count` attempts of one kind.
    pub fn many(&mut self, group: &str, what: &str, count: u64, said: &str, good: bool) {
        self.attempts += count;
        self.bad += u64::from(!good);
        println!(
            "{}{group}: {what} -> {said}",
            if good { "" } else { "BAD " }
        );
    }

    /// Prints the sum, and says whether nothing was bad.
    pub fn close(&self) -> bool {
        println!("{} attempts, {} bad", self.attempts, self.bad);
        self.bad == 0
    }
}

/// The name of an error number, or the number.
pub fn errno_name(errno: Errno) -> String {
    match (errno.name(), errno.to_wire()) {
        (_, 25) => "ENOTTY".into(),
        ("E?", number) => format!("error {number}"),
        (name, _) => name.into(),
    }
}
