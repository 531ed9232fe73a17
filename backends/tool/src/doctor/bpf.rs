//! Whether the kernel takes the program that farlane-net steers a tap's frames by.

use super::finding::{Finding, Name, shown};
use farlane_net::BpfError;
use farlane_sys::chain;

/// What is to be said of it.
#[must_use]
pub fn judge(loaded: &Result<(), BpfError>) -> Vec<Finding> {
    vec![match loaded {
        Ok(()) => Finding::ok(Name::Bpf, "The kernel takes programs of this process"),
        Err(error) => Finding::note(
            Name::Bpf,
            format!(
                "{}. farlane-net cannot steer a tap's frames, which come from one queue then and \
                 are handed over between its threads; it serves no NIC by AF_XDP",
                shown(chain(error))
            ),
            "CAP_BPF for farlane-net, as its unit has it, or root (docs/net.md); in a container, \
             --cap-add BPF and a seccomp profile that allows bpf",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine};

    #[test]
    fn a_kernel_that_takes_no_program_has_a_note() {
        assert_eq!(judge(&Ok(()))[0].level, Fine);
        let refused = judge(&Err(BpfError::System {
            what: "load a program into the kernel",
            source: std::io::Error::from_raw_os_error(libc::EPERM),
        }));
        assert_eq!(refused[0].level, Note);
        let said = &refused[0].what;
        assert!(said.contains("load a program into the kernel: Operation not permitted"));
    }
}
