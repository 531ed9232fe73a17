//! An operator limits what a VM, and what the processes of the host, may have.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, PROGRAM, context, until};
use farlane_abi::Errno;
use farlane_abi::queue::{OP_RDMA_WRITE, SEND_SIGNALED, Sge};
use farlane_abi::rdma::{ACCESS_LOCAL_WRITE, QP_TO_INIT, QP_TO_RTR, QPS_INIT, QPS_RTR};
use farlane_rdma_client::{Context, Cq, Mr, Payload, Pd, Qp, QpAttr, QpCaps, QpInit, SendRequest};
use farlane_support::process::{Process, metric, metrics};
use farlane_transport::socket::SocketTransport;
use farlane_vm_front_end::guest_device::Vm;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn queue_pair(pd: &Arc<Pd>, cq: &Arc<Cq>) -> Result<Qp, Errno> {
    let caps = QpCaps {
        send_wr: 1,
        send_sge: 1,
        inline_bytes: 0,
        recv_wr: 1,
        recv_sge: 1,
    };
    Qp::create(pd, &QpInit::reliable(cq, caps)).map_err(|e| e.errno())
}

/// Goes to RTR, connected to the port with this address.
fn ready_to_receive(qp: &Qp, last: u8) -> Result<(), Errno> {
    let init = QpAttr {
        qp_state: QPS_INIT,
        port_num: 1,
        ..QpAttr::default()
    };
    qp.modify(&init, QP_TO_INIT).unwrap();
    let mut dgid = [0; 16];
    dgid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, last]);
    let rtr = QpAttr {
        qp_state: QPS_RTR,
        path_mtu: 3,
        is_global: 1,
        dgid,
        ah_port: 1,
        ..QpAttr::default()
    };
    qp.modify(&rtr, QP_TO_RTR).map_err(|e| e.errno())
}

/// Has all queue pairs that it can, of two, and returns them.
fn both_queue_pairs(context: &Arc<Context>) -> [Qp; 2] {
    let pd = Pd::allocate(context).unwrap();
    let cq = Cq::create(context, 4, None).unwrap();
    let all = [(); 2].map(|()| queue_pair(&pd, &cq).unwrap());
    assert_eq!(queue_pair(&pd, &cq).err(), Some(Errno::ENOMEM));
    all
}

#[test]
fn a_vm_has_what_its_operator_lets_it_have_and_others_do_not_notice() {
    let mut backend = Backend::start_with(|folder| {
        let socket = folder.join("small").display().to_string();
        let limits = "max_qp=2,max_cq=2,max_mr=max,mr_mem=8K,peers=10.0.0.2";
        vec![format!(
            "--vm=socket={socket},gid=10.0.0.3,window=0,{limits}"
        )]
    });
    let small = Vm::connect(&backend.path("small"), 64 << 20).unwrap();
    let device = context(small.open().unwrap());
    let attributes = device.device_attributes().unwrap();
    assert_eq!(attributes.max_qp.get(), 2);
    assert_eq!(attributes.max_cq.get(), 2);
    assert_eq!(attributes.max_mr.get(), 65536);
    assert_eq!(attributes.max_mr_size.get(), 8192);

    let [one, other] = both_queue_pairs(&device);
    let _last = Cq::create(&device, 4, None).unwrap();
    let refused = Cq::create(&device, 4, None).map_err(|e| e.errno());
    assert_eq!(refused.err(), Some(Errno::ENOMEM));
    let buffer = small.allocate(16 << 10).unwrap();
    let pd = Pd::allocate(&device).unwrap();
    let register = |length| {
        let address = buffer.address();
        // SAFETY: the buffer outlives the registrations.
        let mr = unsafe { Mr::register(&pd, address, length, 0, ACCESS_LOCAL_WRITE) };
        mr.map_err(|e| e.errno())
    };
    assert_eq!(register(8193).err(), Some(Errno::ENOMEM));
    let mr = register(8192).unwrap();
    assert_eq!(register(1).err(), Some(Errno::ENOMEM));

    let shown = |name: &str, vm: &str| {
        let name = format!("farlane_rdma_vm_{name}{{");
        metric(&backend.metrics(), &name, &[("vm", vm)])
    };
    assert_eq!(shown("queue_pairs", "10.0.0.3"), 2);
    assert_eq!(shown("queue_pairs_limit", "10.0.0.3"), 2);
    assert_eq!(shown("memory_region_bytes", "10.0.0.3"), 8192);
    assert_eq!(shown("memory_region_bytes_limit", "10.0.0.3"), 8192);
    assert_eq!(shown("queue_pairs", "10.0.0.1"), 0);
    assert_eq!(shown("queue_pairs", "host"), 0);
    // Of the calls that have made these.
    assert!(shown("call_seconds_count", "10.0.0.3") >= 4);
    assert_eq!(shown("call_seconds_count", "10.0.0.1"), 0);
    drop(mr);
    assert_eq!(shown("memory_region_bytes", "10.0.0.3"), 0);
    register(8192).unwrap();

    assert_eq!(ready_to_receive(&one, 1), Err(Errno::EACCES));
    assert_eq!(ready_to_receive(&other, 2), Ok(()));

    // The other VMs have no limits.
    let vms = [backend.vm(0), backend.vm(1)];
    let buffers = vms.each_ref().map(|vm| vm.allocate(64 << 10).unwrap());
    let ends = [0, 1].map(|i| End::in_vm(&vms[i], &buffers[i]));
    common::connect(&ends[0], &ends[1]);
    for _ in 0..8 {
        queue_pair(&ends[0].pd, &ends[0].cq).unwrap();
    }

    // What a VM had it can have again when it comes back.
    drop((one, other, pd, device, small));
    let mut again = None;
    until("the VM to be let in again", || {
        again = Vm::connect(&backend.path("small"), 64 << 20).ok();
        again.is_some()
    });
    both_queue_pairs(&context(again.unwrap().open().unwrap()));
    backend.assert_alive();
}

#[test]
fn processes_of_the_host_have_their_limit_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut command = Command::new(PROGRAM);
    command
        .arg(format!("--host-socket={},max_qp=2", path("host").display()))
        .arg(format!("--metrics={}", path("metrics").display()))
        .arg("--log-level=warn");
    let _backend = Process::start(&mut command);
    until("the backend to listen", || {
        UnixStream::connect(path("metrics")).is_ok()
    });
    let open = || context(Arc::new(SocketTransport::open(&path("host")).unwrap()));
    let (one, other) = (open(), open());
    let all = both_queue_pairs(&one);
    let pd = Pd::allocate(&other).unwrap();
    let cq = Cq::create(&other, 4, None).unwrap();
    assert_eq!(queue_pair(&pd, &cq).err(), Some(Errno::ENOMEM));
    let text = metrics(&path("metrics"));
    let most = metric(
        &text,
        "farlane_rdma_vm_queue_pairs_limit{",
        &[("vm", "host")],
    );
    assert_eq!(most, 2);
    drop(all);
    queue_pair(&pd, &cq).unwrap();
}

#[test]
fn limits_and_peers_are_told_anew_all_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (control, file, log) = (path("control"), path("rdma.toml"), path("log"));
    let text = |level: &str, port: &str, host: &str, mac: &str| {
        let (vm, host_socket) = (path("vm").display().to_string(), path("host"));
        format!(
            "log-level = '{level}'\n[[vm]]\nsocket = '{vm}'\ngid = '10.0.0.1'\nwindow = 0\n\
             {mac}\n{port}\n[host-socket]\npath = '{}'\n{host}\n",
            host_socket.display()
        )
    };
    std::fs::write(&file, text("warn", "", "", "")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("--config").arg(&file);
    command.arg("--control").arg(&control);
    command.arg("--metrics").arg(path("metrics"));
    command.stderr(std::fs::File::create(&log).unwrap());
    let _backend = Process::start(&mut command);
    until("the backend to listen", || {
        UnixStream::connect(path("metrics")).is_ok()
    });
    let reload = |text: String| {
        std::fs::write(&file, text).unwrap();
        let output = farlane_support::reload::reload(PROGRAM, &control, &file);
        let said = String::from_utf8(output.stderr).unwrap();
        if output.status.success() {
            Ok(())
        } else {
            Err(said)
        }
    };
    let vm = Vm::connect(&path("vm"), 64 << 20).unwrap();
    let guest = context(vm.open().unwrap());
    let process = context(Arc::new(SocketTransport::open(&path("host")).unwrap()));
    let parts = [&guest, &process].map(|context| {
        let cq = Cq::create(context, 4, None).unwrap();
        (Pd::allocate(context).unwrap(), cq)
    });
    let make = |of: usize| queue_pair(&parts[of].0, &parts[of].1);
    let kept = [make(0).unwrap(), make(0).unwrap()];
    let host = "max_qp = 1";

    // One thing that cannot change, and nothing has.
    let said = reload(text(
        "info",
        "max_qp = 1",
        host,
        "mac = '52:54:00:00:00:01'",
    ));
    let wanted = "rdma.toml:2: `mac` of `vm` cannot change";
    assert!(
        said.as_ref().is_err_and(|said| said.contains(wanted)),
        "{said:?}"
    );
    let said = reload(text("info", "max_qp = 1\nmax_cm = 2", host, ""));
    let wanted = "rdma.toml:2: `max_cm` of `vm` cannot change";
    assert!(
        said.as_ref().is_err_and(|said| said.contains(wanted)),
        "{said:?}"
    );
    // Who may connect is not only this backend's business, but the socket's file's.
    let said = reload(text("info", "", "max_qp = 1\nuser = [61234]", ""));
    let wanted = "`user` of `host-socket` cannot change";
    assert!(
        said.as_ref().is_err_and(|said| said.contains(wanted)),
        "{said:?}"
    );
    let said = reload(text("info", "max_qp = 1\nrate = 'much'", host, ""));
    assert!(
        said.as_ref()
            .is_err_and(|said| said.contains("rdma.toml:2: ")),
        "{said:?}"
    );
    drop((make(0).unwrap(), make(1).unwrap(), make(1).unwrap()));
    let limits = || {
        let text = metrics(&path("metrics"));
        text.matches("queue_pairs_limit{").count()
    };
    let has_said = |what: &str| std::fs::read_to_string(&log).unwrap().contains(what);
    assert!(limits() == 0 && has_said("refused: `mac` of `vm`") && !has_said("INFO"));

    // What it has more than it may it keeps, and connects nothing to whom it may not.
    let port = "max_qp = 1\nmr_mem = '8K'\nrate = '1G'\npeers = '10.0.0.2'";
    reload(text("info", port, host, "")).unwrap();
    assert_eq!((make(0).err(), limits()), (Some(Errno::ENOMEM), 2));
    let [one, other] = kept;
    assert_eq!(ready_to_receive(&one, 9), Err(Errno::EACCES));
    assert_eq!(ready_to_receive(&one, 2), Ok(()));
    let alone = make(1).unwrap();
    assert_eq!(make(1).err(), Some(Errno::ENOMEM));
    assert!(has_said("told anew"));
    let attributes = guest.device_attributes().unwrap();
    assert_eq!(
        (attributes.max_qp.get(), attributes.max_mr_size.get()),
        (1, 8192)
    );

    // And back.
    reload(text("warn", "", "", "")).unwrap();
    assert_eq!(limits(), 0);
    let more = [make(0).unwrap(), make(0).unwrap(), make(1).unwrap()];
    assert_eq!(ready_to_receive(&other, 9), Ok(()));
    drop((alone, more));
}

/// Writes so many bytes from one end to the other, several times, and returns how long that takes.
fn write(from: &End, to: &End, length: u32, times: u64) -> Duration {
    let began = Instant::now();
    for wr_id in 0..times {
        let gather = [Sge {
            addr: (from.mr.address() as u64).into(),
            length: length.into(),
            lkey: from.mr.lkey().into(),
        }];
        let request = SendRequest {
            wr_id,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: to.mr.address() as u64,
            rkey: to.mr.rkey(),
            payload: Payload::Gather(&gather),
        };
        from.qp.post_send(&request).unwrap();
        let done = from.completion();
        assert_eq!((done.status, done.wr_id.get()), (0, wr_id));
    }
    began.elapsed()
}

#[test]
fn what_a_vm_carries_out_in_a_second_is_limited() {
    const RATE: u64 = 4 << 20;
    const OPERATIONS: u64 = 500;
    let mut backend = Backend::start_with(|folder| {
        let vm = |name: &str, last, limit: String| {
            let socket = folder.join(name).display().to_string();
            format!("--vm=socket={socket},gid=10.0.0.{last},window=0,{limit}")
        };
        let rate = vm("rate", 3, format!("rate={RATE}"));
        vec![rate, vm("ops", 4, format!("ops={OPERATIONS}"))]
    });
    let vm = |name: &str| Vm::connect(&backend.path(name), 64 << 20).unwrap();
    let vms = [vm("rate"), vm("ops"), vm("vm0")];
    let buffers = vms.each_ref().map(|vm| vm.allocate(64 << 10).unwrap());
    let ends = [0, 1, 2].map(|i| End::in_vm(&vms[i], &buffers[i]));
    let shown = |name: &str, vm: &str| {
        let name = format!("farlane_rdma_vm_{name}{{");
        metric(&backend.metrics(), &name, &[("vm", vm)])
    };
    let [rate, ops, free] = &ends;
    // 20 ms of each are there at once.
    common::connect(rate, free);
    let took = write(rate, free, 64 << 10, 32);
    let left = (2 << 20) - RATE / 50;
    assert!(
        took >= Duration::from_secs(1) * u32::try_from(left).unwrap() / (4 << 20),
        "{took:?}"
    );
    // A turn is counted when it has ended.
    until("the bytes", || shown("bytes", "10.0.0.3") == 2 << 20);
    assert_eq!(shown("rate_limit", "10.0.0.3"), RATE);
    assert!(shown("throttled_us", "10.0.0.3") > 0);

    let ops_peer = End::in_vm(&vms[2], &buffers[2]);
    common::connect(ops, &ops_peer);
    let took = write(ops, &ops_peer, 8, 260);
    assert!(took >= Duration::from_millis(500), "{took:?}");
    until("the operations", || shown("operations", "10.0.0.4") == 260);
    assert_eq!(shown("operations_limit", "10.0.0.4"), OPERATIONS);

    // Who has no limit waits for none, also where its peer has one.
    write(free, rate, 64 << 10, 32);
    until("the bytes", || shown("bytes", "10.0.0.1") == 2 << 20);
    assert_eq!(shown("throttled_us", "10.0.0.1"), 0);
    backend.assert_alive();
}
