//! Which users may connect to a device.

use std::thread;

use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::socket::{Connection, Patience};
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_uid;

use crate::world::{LIMIT, World};

/// A VMM of user `uid` negotiates with the device.
fn client_of(world: &World, uid: u32) -> Result<Client, CallError> {
    let path = world.path.clone();
    let client = thread::spawn(move || {
        set_thread_uid(Uid::from_raw(uid)).unwrap(); // of this thread alone
        Client::new(Connection::connect(&path, LIMIT, Patience::NONE).unwrap())
    });
    client.join().unwrap()
}

#[test]
fn a_client_that_is_not_root_gets_no_region_s_file() {
    if !geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let world = World::of_shared_file();
    let refused = client_of(&world, 4001).err().map(|error| error.to_string());
    assert!(refused.is_some(), "it would map all slices");
    assert!(client_of(&world, 0).is_ok());
}
