//! The users that may connect to a device.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::session::Fault;
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_uid;

use crate::cli::{Host, Server};
use crate::world::{BAR2, LIMIT, World};

/// A VMM of user `uid` negotiates with the device at `path`.
fn client_of(path: &Path, uid: u32) -> Result<Client, CallError> {
    let path = path.to_owned();
    let client = thread::spawn(move || {
        set_thread_uid(Uid::from_raw(uid)).unwrap(); // of this thread alone
        Client::new(Connection::connect(&path, LIMIT, BusyPoll::NONE).unwrap())
    });
    client.join().unwrap()
}

#[test]
fn a_client_that_is_not_root_gets_no_region_s_file() {
    if !geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let world = World::of_shared_file();
    let refused = client_of(&world.path, 4001).err().map(|error| error.to_string());
    assert!(refused.is_some(), "it would map all slices");
    assert!(client_of(&world.path, 0).is_ok());
}

/// Connects as user `uid`, and sends nothing.
fn silent_client_of(path: &Path, uid: u32) -> UnixStream {
    let path = path.to_owned();
    let client = thread::spawn(move || {
        set_thread_uid(Uid::from_raw(uid)).unwrap(); // of this thread alone
        UnixStream::connect(path).unwrap()
    });
    client.join().unwrap()
}

/// A server with a socket that every user can reach.
fn open_server(host: &Host) -> Server {
    let server = host.serve("serve --region local --size 2MiB --socket vm.sock --timeout 0");
    set_permissions(host.path(""), Permissions::from_mode(0o755)).unwrap();
    set_permissions(host.path("vm.sock"), Permissions::from_mode(0o666)).unwrap();
    server
}

#[test]
fn bytes_of_one_user_reach_no_client_of_another_until_the_slice_is_scrubbed() {
    if !geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let host = Host::new();
    let server = open_server(&host);
    let path = host.path("vm.sock");
    let mut first = client_of(&path, 4001).unwrap();
    first.write(BAR2, 0x1000, b"secret").unwrap();
    // A mapping outlives the connection.
    let kept = first.region_info(BAR2).unwrap().1;
    drop(first);
    for user in [4002, 0] {
        let refused = client_of(&path, user).map(drop);
        assert!(
            matches!(refused, Err(CallError::Fault(Fault::Refused { errno: 13 }))),
            "{user}: {refused:?}"
        );
    }
    let mut bytes = [0; 6];
    client_of(&path, 4001).unwrap().read(BAR2, 0x1000, &mut bytes).unwrap();
    assert_eq!(&bytes, b"secret", "the same user's guest may reboot");
    drop(kept);
    assert_eq!(server.end_in_time(), Some(0));
    let server = open_server(&host);
    client_of(&path, 4002).unwrap().read(BAR2, 0x1000, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 6]);
    assert_eq!(server.end_in_time(), Some(0));
}

#[test]
fn forty_refused_users_that_send_nothing_do_not_keep_the_owner_waiting() {
    if !geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let host = Host::new();
    let server = open_server(&host);
    let path = host.path("vm.sock");
    drop(client_of(&path, 0).unwrap());
    let silent: Vec<_> = (0..40).map(|_| silent_client_of(&path, 4001)).collect();
    let owner = client_of(&path, 0).unwrap();
    let mut all: Vec<_> = silent.iter().map(|silent| PollFd::new(silent, PollFlags::IN)).collect();
    let given_up = poll(&mut all, Some(&Timespec::default())).unwrap();
    assert!(given_up < 40, "the server waited for all of them first");
    drop(owner);
    assert_eq!(server.end_in_time(), Some(0));
}
