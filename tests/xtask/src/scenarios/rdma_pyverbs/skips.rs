//! Why tests of rdma-core are skipped: the same table is in `docs/rdma.md`.

use std::collections::BTreeMap;

use super::results::{Ending, Test};

/// Tests that may be skipped.
pub struct Skip {
    /// How the reason begins that the test gives.
    pub reason: &'static str,
    /// How many tests give it at most.
    pub at_most: usize,
    /// Why it is so.
    pub because: &'static str,
    /// Where it is given.
    pub places: &'static [Where],
}

/// Where the tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// Over our library, on this machine.
    Host,
    /// Over our library, in a VM.
    Vm,
    /// Over the RDMA device of a VM's kernel.
    Kernel,
}

impl Where {
    /// In tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Vm => "VM",
            Self::Kernel => "kernel",
        }
    }
}

/// Over our library.
const OURS: &[Where] = &[Where::Host, Where::Vm];
const ALL: &[Where] = &[Where::Host, Where::Vm, Where::Kernel];

/// Modules of tests for one vendor's hardware, by how their names begin. They are skipped for a
/// variety of reasons.
pub const VENDORS: [&str; 2] = ["test_mlx5_", "test_efa"];

/// Reasons for which the other tests may be skipped.
pub const SKIPS: &[Skip] = &[
    Skip {
        reason: "Device /dev/dri/renderD128 is not present",
        at_most: 10,
        because: "no buffers of a GPU's kernel driver (DRM)",
        places: ALL,
    },
    Skip {
        reason: "Allocating dmabuf is not supported by /dev/dri/renderD128",
        at_most: 10,
        because: "no buffers of a GPU's kernel driver (DRM)",
        places: OURS,
    },
    Skip {
        reason: "Reg dma-buf MR is not supported by the RDMA driver",
        at_most: 10,
        because: "no buffers of a GPU's kernel driver (DRM)",
        places: OURS,
    },
    Skip {
        reason: "cuda-python 12.0+ must be installed",
        at_most: 1,
        because: "no CUDA",
        places: OURS,
    },
    Skip {
        reason: "Create QP type 8 is not supported",
        at_most: 6,
        because: "no raw packets, and nothing that steers them to queues",
        places: ALL,
    },
    Skip {
        reason: "Create Raw Packet QP",
        at_most: 5,
        because: "no raw packets",
        places: ALL,
    },
    Skip {
        reason: "Extended CQ is not supported",
        at_most: 4,
        because: "no tag matching, which is one vendor's",
        places: ALL,
    },
    Skip {
        reason: "There are no huge pages of size 2M allocated",
        at_most: 3,
        because: "no huge page that the kernel keeps for programs (`vm.nr_hugepages`)",
        places: ALL,
    },
    Skip {
        reason: "ODP is not supported - No ODP caps",
        at_most: 15,
        because: "no paging on demand in a VM: its memory is pinned while it is registered",
        places: &[Where::Vm, Where::Kernel],
    },
    Skip {
        reason: "Device memory is not supported",
        at_most: 18,
        because: "no device memory in rdma-core's provider for rxe",
        places: &[Where::Kernel],
    },
    Skip {
        reason: "Create XRCD is not supported",
        at_most: 7,
        because: "no XRC in rdma-core's provider for rxe",
        places: &[Where::Kernel],
    },
    Skip {
        reason: "Rereg MR is not supported",
        at_most: 5,
        because: "no `ibv_rereg_mr` in rdma-core's provider for rxe",
        places: &[Where::Kernel],
    },
    Skip {
        reason: "Importing a device is not supported",
        at_most: 1,
        because: "no import of contexts in rdma-core's provider for rxe",
        places: &[Where::Kernel],
    },
];

/// Skipped tests, sorted by reason.
#[derive(Debug, Default)]
pub struct Sorted<'a> {
    /// Of vendors' hardware.
    pub vendors: usize,
    /// By the place of the reason in [`SKIPS`].
    listed: BTreeMap<usize, Vec<&'a str>>,
    /// One a line, with what the test says.
    unlisted: Vec<String>,
}

impl<'a> Sorted<'a> {
    /// Tests that have run there.
    pub fn new(tests: &'a [Test], place: Where) -> Self {
        let mut sorted = Self::default();
        for test in tests {
            let Ending::Skipped(reason) = &test.ending else {
                continue;
            };
            if VENDORS.iter().any(|of| test.module().starts_with(of)) {
                sorted.vendors += 1;
                continue;
            }
            match SKIPS
                .iter()
                .position(|skip| reason.starts_with(skip.reason) && skip.places.contains(&place))
            {
                Some(at) => sorted.listed.entry(at).or_default().push(&test.name),
                None => sorted.unlisted.push(format!("{}: {reason}", test.name)),
            }
        }
        sorted
    }

    /// Tests that are skipped for a reason that is not listed, and reasons that more tests have
    /// given than may: one a line.
    pub fn surplus(&self) -> Vec<String> {
        let mut found = self.unlisted.clone();
        for (at, names) in &self.listed {
            let skip = &SKIPS[*at];
            if names.len() > skip.at_most {
                found.push(format!(
                    "\"{}\" is said of {} tests, and may be of {}: {}",
                    skip.reason,
                    names.len(),
                    skip.at_most,
                    names.join(", ")
                ));
            }
        }
        found
    }

    /// How many tests are skipped because of what, but those of vendors.
    pub fn causes(&self) -> BTreeMap<&'static str, usize> {
        let mut causes = BTreeMap::new();
        for (at, names) in &self.listed {
            *causes.entry(SKIPS[*at].because).or_default() += names.len();
        }
        causes
    }
}

#[cfg(test)]
mod tests {
    use farlane_kit::workspace::Workspace;

    use super::*;

    fn skipped(name: &str, reason: &str) -> Test {
        Test {
            name: name.into(),
            ending: Ending::Skipped(reason.into()),
        }
    }

    #[test]
    fn a_skip_that_is_not_listed_is_found() {
        let cuda = "cuda-python 12.0+ must be installed to run CUDA tests";
        let mut tests = vec![
            skipped("test_cuda_dmabuf.A.b", cuda),
            skipped("test_mlx5_cq.A.b", "It is of another vendor"),
            Test {
                name: "test_mr.A.b".into(),
                ending: Ending::Passed,
            },
        ];
        let sorted = Sorted::new(&tests, Where::Host);
        assert_eq!(sorted.surplus(), [""; 0]);
        assert_eq!(sorted.vendors, 1);
        assert_eq!(sorted.causes(), BTreeMap::from([("no CUDA", 1)]));
        tests.push(skipped("test_mr.A.c", "New"));
        assert_eq!(
            Sorted::new(&tests, Where::Host).surplus(),
            ["test_mr.A.c: New"]
        );
        tests.push(skipped("test_mr.A.d", cuda));
        assert_eq!(Sorted::new(&tests, Where::Host).surplus().len(), 2);
        let paging = [skipped(
            "test_odp.A.b",
            "ODP is not supported - No ODP caps",
        )];
        assert_eq!(Sorted::new(&paging, Where::Vm).surplus(), [""; 0]);
        assert_eq!(Sorted::new(&paging, Where::Kernel).surplus(), [""; 0]);
        assert_eq!(Sorted::new(&paging, Where::Host).surplus().len(), 1);
    }

    #[test]
    fn the_documentation_lists_the_same() {
        let path = Workspace::find().unwrap().root().join("docs/rdma.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (_, section) = text.split_once("## Tests of rdma-core").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows: Vec<_> = section
            .lines()
            .filter(|line| line.starts_with("| \""))
            .collect();
        let listed: Vec<_> = SKIPS
            .iter()
            .map(|skip| {
                let Skip {
                    reason,
                    at_most,
                    because,
                    places,
                } = skip;
                let places: Vec<_> = places.iter().map(|place| place.name()).collect();
                let places = places.join(", ");
                format!("| \"{reason}\" | {places} | {at_most} | {because} |")
            })
            .collect();
        assert_eq!(rows, listed);
    }
}
