//! Any bytes are frames, an error, or not yet all there; a frame and its message survive being written again.
#![no_main]

use egm_vfio_wire::frame::split;
use egm_vfio_wire::message::{Request, RegionInfo, RegionReply};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

mod messages;

fuzz_mutator!(|data: &mut [u8], size: usize, most: usize, seed: u32| { messages::mutate(data, size, most, seed) });

fuzz_target!(|bytes: &[u8]| {
    let (mut rest, mut count) = (bytes, 0);
    while let Ok(Some((frame, after))) = split(rest, 0x10_0000) {
        let whole = frame.encode(0x10_0000).expect("what was read can be written");
        let again = split(&whole, 0x10_0000).expect("a frame").expect("all of it");
        assert_eq!((again.0, again.1), (frame, &[][..]));
        if let Ok(request) = Request::decode(frame.header.command, frame.body) {
            let mut body = Vec::new();
            request.encode(&mut body);
            body.extend_from_slice(request.data());
            let again = Request::decode(frame.header.command, &body).expect("a request that was one");
            assert_eq!(again, request);
        }
        if let Ok(RegionReply::Whole(info)) = RegionInfo::decode(frame.body, u32::MAX) {
            let mut body = Vec::new();
            info.encode(u32::MAX, &mut body);
            assert_eq!(RegionInfo::decode(&body, u32::MAX), Ok(RegionReply::Whole(info)));
        }
        (rest, count) = (after, count + 1);
    }
    messages::count(count);
});
