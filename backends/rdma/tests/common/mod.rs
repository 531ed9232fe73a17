//! A backend of its own for each test, and verbs over any transport.

#![allow(dead_code, reason = "each test file uses a part")]

use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, QP_STATE, QP_TO_INIT, QP_TO_RTR,
    QP_TO_RTS, QPS_INIT, QPS_RESET, QPS_RTR, QPS_RTS,
};
use farlane_rdma_client::{
    Address, Channel, Completion, Context, Cq, DeviceInfo, Mr, Pd, Qp, QpAttr, QpCaps, QpInit,
};
use farlane_support::process::{Process, metric, metrics, state};
use farlane_transport::Transport;
use farlane_vm_front_end::guest_device::{GuestBuffer, Vm};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

pub use farlane_support::process::until;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-rdma");

/// A running backend with two VMs' sockets, a host socket and metrics.
pub struct Backend {
    pub process: Process,
    folder: tempfile::TempDir,
}

impl Backend {
    pub fn start() -> Self {
        Self::start_with(|_| Vec::new())
    }

    /// Lets other users in at the host socket, which they can reach: `,user=...` and so on.
    pub fn start_for(others: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let everybody = std::fs::Permissions::from_mode(0o711);
        std::fs::set_permissions(folder.path(), everybody).unwrap();
        let process = Self::spawn(&folder, others, Vec::new(), Stdio::inherit());
        let backend = Self { process, folder };
        backend.await_socket();
        backend
    }

    /// With further arguments, which may name files in the backend's folder.
    pub fn start_with(arguments: impl FnOnce(&Path) -> Vec<String>) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), arguments, Stdio::inherit())
    }

    /// Its log goes into the file `log` of its folder.
    pub fn start_with_log() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        Self::start_in(folder, |_| Vec::new(), log.into())
    }

    fn start_in(
        folder: tempfile::TempDir,
        arguments: impl FnOnce(&Path) -> Vec<String>,
        log: Stdio,
    ) -> Self {
        let process = Self::spawn(&folder, "", arguments(folder.path()), log);
        let backend = Self { process, folder };
        backend.await_socket();
        backend
    }

    /// Kills it, and starts the next one at the same place.
    pub fn kill_and_start(&mut self) {
        self.process.kill_and_wait();
        std::fs::remove_file(self.path("metrics")).unwrap();
        self.process = Self::spawn(&self.folder, "", Vec::new(), Stdio::inherit());
        self.await_socket();
    }

    /// The socket that is made last; that it is there does not say that the backend listens at it.
    fn await_socket(&self) {
        until("the backend to listen", || {
            UnixStream::connect(self.path("metrics")).is_ok()
        });
    }

    fn spawn(
        folder: &tempfile::TempDir,
        others: &str,
        arguments: Vec<String>,
        log: Stdio,
    ) -> Process {
        let path = |name: &str| folder.path().join(name).display().to_string();
        let mut command = Command::new(PROGRAM);
        command
            .arg(format!(
                "--vm=socket={},gid=10.0.0.1,window=16M",
                path("vm0")
            ))
            .arg(format!("--vm=socket={},gid=10.0.0.2,window=0", path("vm1")))
            .arg(format!("--host-socket={}{others}", path("host")))
            .arg(format!("--metrics={}", path("metrics")))
            .arg("--log-level=warn")
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(log);
        Process::start(&mut command)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn vm(&self, number: u32) -> Arc<Vm> {
        Vm::connect(&self.path(&format!("vm{number}")), 64 << 20).unwrap()
    }

    pub fn host_link(&self) -> Arc<dyn Transport> {
        Arc::new(farlane_transport::socket::SocketTransport::open(&self.path("host")).unwrap())
    }

    pub fn metrics(&self) -> String {
        metrics(&self.path("metrics"))
    }

    pub fn counter(&self, name: &str) -> u64 {
        metric(&self.metrics(), &format!("farlane_rdma_{name} "), &[])
    }

    /// What it has logged, where it was [started](Self::start_with_log) for that.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// Open files, where we may see them: the backend hides from its user, but not from root.
    pub fn open_files(&self) -> Option<usize> {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).ok()?;
        Some(folder.count())
    }

    pub fn assert_alive(&mut self) {
        assert!(
            self.process.try_wait().unwrap().is_none(),
            "the backend has ended"
        );
    }
}

/// A test in a process of its own, which does the next thing when it is told to and says when it is
/// done.
pub struct Partner {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

/// What begins a line of a partner's that is for the other side.
const MARK: &str = "partner: ";

impl Partner {
    /// Starts `test` with a variable in its environment by which it knows that it is the partner.
    pub fn start(test: &str, variable: &str, value: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(variable, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            to: child.stdin.take().unwrap(),
            from: BufReader::new(child.stdout.take().unwrap()).lines(),
            child,
        }
    }

    pub fn tell(&mut self, what: &str) {
        writeln!(self.to, "{what}").unwrap();
    }

    /// The next line that is for us: what follows the mark.
    pub fn hear(&mut self) -> String {
        let mark = |line: String| line.split_once(MARK).map(|(_, said)| said.to_owned());
        let lines = self.from.by_ref().map(Result::unwrap);
        lines.filter_map(mark).next().unwrap()
    }

    /// The numbers in the next such line.
    pub fn hear_numbers<const N: usize>(&mut self) -> [u64; N] {
        let said = self.hear();
        let numbers: Vec<_> = said.split(' ').map(|word| word.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The partner says this.
pub fn say(what: impl std::fmt::Display) {
    println!("{MARK}{what}");
}

/// What the partner is told next.
pub fn told() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Whether a process or a thread of this one is blocked in a system call.
pub fn is_blocked(thread: u32) -> bool {
    state(&std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap()) == 'S'
}

pub fn context(transport: Arc<dyn Transport>) -> Arc<Context> {
    let info = DeviceInfo {
        number: 0,
        address: Address::Device("/dev/farlane0".into()),
    };
    Context::over(info, transport).unwrap()
}

/// One end of a connection, with memory that the peer may write and read.
pub struct End {
    pub mr: Mr,
    pub qp: Qp,
    pub cq: Arc<Cq>,
    pub channel: Arc<Channel>,
    pub pd: Arc<Pd>,
    pub context: Arc<Context>,
}

impl End {
    /// # Safety
    /// As [`Mr::register`].
    pub unsafe fn new(context: &Arc<Context>, address: usize, length: usize) -> Self {
        let pd = Pd::allocate(context).unwrap();
        let channel = Channel::create(context).unwrap();
        let cq = Cq::create(context, 256, Some(&channel)).unwrap();
        let caps = QpCaps {
            send_wr: 64,
            send_sge: 4,
            inline_bytes: 64,
            recv_wr: 64,
            recv_sge: 4,
        };
        let qp = Qp::create(&pd, &QpInit::reliable(&cq, caps)).unwrap();
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
        // SAFETY: as promised by the caller.
        let mr = unsafe { Mr::register(&pd, address, length, address as u64, access) }.unwrap();
        Self {
            mr,
            qp,
            cq,
            channel,
            pd,
            context: Arc::clone(context),
        }
    }

    pub fn in_vm(vm: &Arc<Vm>, buffer: &GuestBuffer) -> Self {
        let context = context(vm.open().unwrap());
        // SAFETY: tests keep their buffers until their ends are gone.
        unsafe { Self::new(&context, buffer.address(), buffer.len()) }
    }

    pub fn connect(&self, peer: &Self) {
        let gid = peer.context.gid(1, 0).unwrap();
        connect_to(&self.qp, peer.qp.number(), gid.raw);
    }

    /// The next completion.
    pub fn completion(&self) -> Completion {
        let mut taken = [Completion::default(); 1];
        until("a completion", || self.cq.poll(&mut taken).unwrap() == 1);
        taken[0]
    }
}

/// Makes a queue pair ready, connected to the one of a number.
pub fn connect_to(qp: &Qp, number: u32, gid: [u8; 16]) {
    let access = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
    let init = QpAttr {
        qp_state: QPS_INIT,
        port_num: 1,
        qp_access_flags: access.into(),
        ..QpAttr::default()
    };
    qp.modify(&init, QP_TO_INIT).unwrap();
    let rtr = QpAttr {
        qp_state: QPS_RTR,
        path_mtu: 3,
        dest_qp_num: number.into(),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        is_global: 1,
        dgid: gid,
        ah_port: 1,
        ..QpAttr::default()
    };
    qp.modify(&rtr, QP_TO_RTR).unwrap();
    let rts = QpAttr {
        qp_state: QPS_RTS,
        timeout: 14,
        retry_cnt: 2,
        rnr_retry: 7,
        max_rd_atomic: 1,
        ..QpAttr::default()
    };
    qp.modify(&rts, QP_TO_RTS).unwrap();
}

/// Has a queue pair begin anew.
pub fn reset(qp: &Qp) {
    let attributes = QpAttr {
        qp_state: QPS_RESET,
        ..QpAttr::default()
    };
    qp.modify(&attributes, QP_STATE).unwrap();
}

pub fn connect(one: &End, other: &End) {
    one.connect(other);
    other.connect(one);
}

/// Bytes that show where they belong.
pub fn pattern(seed: usize) -> impl Iterator<Item = u8> {
    (seed..).map(|i| u8::try_from((i * 31 + i / 251) % 256).unwrap())
}
