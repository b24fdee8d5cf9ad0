//! Any bytes to either side: it ends, without a panic and within its limits.
//!
//! `EGM_HOSTILE_CASES=1000000` runs so many cases of each, instead of a few hundred.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use egm_vfio_wire::client::Client;
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{BusyPoll, Connection};
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::toy::{LIMIT, Toy};

fn config() -> Config {
    let cases = std::env::var("EGM_HOSTILE_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: cases.unwrap_or(256), ..Config::default() }
}

/// Messages that often get past the envelope: a known command, a size that is nearly right, small numbers.
fn messages(flags: &'static [u32]) -> impl Strategy<Value = Vec<u8>> {
    // Mostly zero, often small, sometimes anything: numbers that make sense, and some that nearly do.
    let plausible = |byte: u8| match byte & 7 {
        0..5 => 0,
        5..7 => byte >> 3,
        _ => byte,
    };
    let body = prop::collection::vec(any::<u8>(), 0..96)
        .prop_map(move |bytes| bytes.into_iter().map(plausible).collect::<Vec<_>>());
    let message = (0..20_u16, prop::sample::select(flags), body, 0..40_u32);
    prop::collection::vec(message, 0..24).prop_map(|messages| {
        let one = |(id, (command, flags, body, lie)): (u16, (u16, u32, Vec<u8>, u32))| {
            let honest = 16 + u32::try_from(body.len()).unwrap();
            let size = if lie == 0 { honest + 1 } else { honest };
            let head = [id, command].into_iter().flat_map(u16::to_le_bytes);
            head.chain([size, flags, 22].into_iter().flat_map(u32::to_le_bytes))
                .chain(body)
                .collect::<Vec<_>>()
        };
        (0..).zip(messages).flat_map(one).collect()
    })
}

const AGREED: [u8; 20] = [0, 0, 1, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_server_survives_any_client(bytes in messages(&[0, 0, 0, 0x10, 1, 0x21, 7]), negotiates in prop::bool::weighted(0.9)) {
        let (mut client, theirs) = UnixStream::pair().unwrap();
        let mut toy = Toy::new();
        // The requests fit the socket; the replies need not, and are taken as they come.
        if negotiates {
            client.write_all(&AGREED).unwrap();
        }
        client.write_all(&bytes).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let replies = std::thread::spawn(move || std::io::copy(&mut client, &mut std::io::sink()).unwrap_or(0));
        let mut connection = Connection::new(theirs.into(), LIMIT, BusyPoll::NONE).unwrap();
        let _ = serve(&mut connection, &mut toy);
        prop_assert_eq!((toy.left, toy.windows.len()), (1, 0));
        drop(connection);
        // A request is answered once at most, and by no more than one transfer.
        prop_assert!(replies.join().unwrap() <= 25 * ((1 << 20) + 64));
    }

    #[test]
    fn a_client_survives_any_server(bytes in messages(&[1, 1, 1, 0x21, 0, 0x10, 7]), agrees in prop::bool::weighted(0.9)) {
        let (mut server, ours) = UnixStream::pair().unwrap();
        if agrees {
            let mut agreed = AGREED;
            agreed[8] = 1;
            server.write_all(&agreed).unwrap();
        }
        server.write_all(&bytes).unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        let Ok(mut client) = Client::new(Connection::new(ours.into(), LIMIT, BusyPoll::NONE).unwrap()) else {
            return Ok(());
        };
        let _ = client.device_info();
        let _ = client.region_info(0);
        let _ = client.irq_info(0);
        let _ = client.read(0, 0, &mut [0; 8]);
        let _ = client.write(0, 0, &[0; 8]);
        let _ = client.reset();
        // The input ends here: after that nothing is answered any more.
        let lost = (0..32).any(|_| client.reset().is_err_and(|error| !error.stands()));
        prop_assert!(lost);
    }
}
