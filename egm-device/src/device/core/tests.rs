use egm_address::BarOffset;
use proptest::prelude::*;

use super::*;
use crate::device::registers::{SIZE, SPANS, TABLE, WINDOW};

const FACTS: Facts = Facts {
    size: 0x60_0000,
    base: 0x4000_0000,
    page: 0x1_0000,
    pxm: Some(4),
    scrub_at_reset: false,
    msix: true,
};

fn spans(spans: &[(u64, u64)]) -> SpanSet<InBar> {
    spans.iter().map(|(start, size)| Span::new(BarOffset::new(*start), *size).unwrap()).collect()
}

fn read(core: &mut Core, register: Register) -> u64 {
    let mut bytes = [0; 8];
    core.read(register.offset(), &mut bytes[..register.bytes()]);
    u64::from_le_bytes(bytes)
}

fn write(core: &mut Core, register: Register, word: u32) -> Effect {
    core.write(register.offset(), &word.to_le_bytes())
}

/// All registers by name, as a guest reads them.
fn dump(core: &mut Core) -> String {
    Register::ALL.iter().fold(String::new(), |text, register| {
        text + &format!("{:#04x} {register:?} {:#x}\n", register.offset(), read(core, *register))
    })
}

#[test]
fn a_fresh_function_reads_as_this_table() {
    let mut core = Core::new(FACTS, spans(&[(0x1_0000, 0x1_0000), (0x10_0000, 0x2_0000)]));
    let expected = "\
0x00 Magic 0x444d4745
0x04 Version 0x1
0x08 Size 0x600000
0x10 Base 0x40000000
0x18 Page 0x10000
0x20 Pxm 0x4
0x24 Generation 0x0
0x28 Spans 0x2
0x2c First 0x0
0x30 RetiredBytes 0x30000
0x38 Events 0x0
0x3c Pending 0x0
0x40 Doorbell 0x0
0x44 Status 0x0
0x48 Scrubbed 0x0
0x50 Control 0x0
0x54 Mistakes 0x0
";
    assert_eq!(dump(&mut core), expected);
}

#[test]
fn the_design_page_has_a_row_for_each_register_with_its_offset_and_width() {
    let page = include_str!("../../../DESIGN.md");
    let page = page.split_once("## The device").unwrap().1.split_once("\n## ").unwrap().0;
    let rows = page.lines().filter(|line| line.starts_with("| 0x") && !line.starts_with("| 0x1000"));
    let cell = |line: &str, index: usize| line.split('|').nth(index + 1).unwrap().trim().to_owned();
    let rows: Vec<_> = rows.map(|line| (cell(line, 0), cell(line, 1), cell(line, 2))).collect();
    let access = |register| match register {
        Register::First | Register::Control => "rw",
        Register::Pending => "rw1c",
        Register::Doorbell => "wo",
        _ => "ro",
    };
    let expected = Register::ALL.iter().map(|register| {
        let offset = format!("{:#04x}", register.offset());
        (offset, (register.bytes() * 8).to_string(), access(*register).to_owned())
    });
    assert_eq!(rows, expected.collect::<Vec<_>>());
}

#[test]
fn wide_registers_are_read_in_halves_too() {
    let mut core = Core::new(Facts { size: 0x12_3456_0000, ..FACTS }, SpanSet::default());
    let mut half = [0; 4];
    core.read(0x0c, &mut half);
    assert_eq!(u32::from_le_bytes(half), 0x12);
    core.read(0x08, &mut half);
    assert_eq!(u32::from_le_bytes(half), 0x3456_0000);
}

#[test]
fn accesses_that_make_no_sense_read_ones_change_nothing_and_are_counted() {
    let mut core = Core::new(FACTS, SpanSet::default());
    let before = dump(&mut core);
    let mut byte = [0];
    core.read(0, &mut byte);
    assert_eq!(byte, [0xff]);
    for (offset, length) in
        [(0, 4), (0x08, 8), (0x24, 4), (0x44, 4), (0x40, 1), (0x58, 4), (0x1000, 8), (2, 4)]
    {
        assert_eq!(core.write(offset, &vec![1; length]), Effect::Nothing, "{offset:#x}");
    }
    assert_eq!(write(&mut core, Register::Doorbell, 9), Effect::Nothing);
    assert_eq!(read(&mut core, Register::Mistakes), 10);
    assert_eq!(dump(&mut core), before.replace("Mistakes 0x0", "Mistakes 0xa"));
}

#[test]
fn the_window_shows_the_retired_list_from_the_requested_span() {
    let many = (0..1000).map(|n| (n * 0x2000, 0x1000)).collect::<Vec<_>>();
    let mut core = Core::new(Facts { size: 0x80_0000, ..FACTS }, spans(&many));
    let mut shown = Vec::new();
    for first in (0..1024).step_by(SPANS as usize) {
        assert_eq!(write(&mut core, Register::First, first), Effect::Nothing);
        for index in 0..u64::from(SPANS) {
            let mut pair = [[0; 8]; 2];
            core.read(u64::from(WINDOW) + index * 16, &mut pair[0]);
            core.read(u64::from(WINDOW) + index * 16 + 8, &mut pair[1]);
            shown.push((u64::from_le_bytes(pair[0]), u64::from_le_bytes(pair[1])));
        }
    }
    assert_eq!(shown[..1000], many);
    assert!(shown[1000..].iter().all(|pair| *pair == (0, 0)));
    assert_eq!(write(&mut core, Register::First, u32::MAX), Effect::Nothing);
    let mut bytes = [1; 8];
    core.read(u64::from(WINDOW) + 16, &mut bytes);
    assert_eq!(bytes, [0; 8]);
}

const RETIRED: Effect = Effect::Fire(&[Event::Retired, Event::Resized]);

#[test]
fn retired_pages_are_reported_once_and_only_those_of_the_slice() {
    let mut core = Core::new(FACTS, SpanSet::default());
    assert_eq!(core.retire(&spans(&[(0x1_0000, 0x1_0000)])), RETIRED);
    assert_eq!(core.retire(&spans(&[(0x1_0000, 0x1_0000), (FACTS.size, 0x1000)])), Effect::Nothing);
    assert_eq!(core.retire(&spans(&[(0x1_8000, 0x1_0000)])), RETIRED);
    assert_eq!(core.retired(), &spans(&[(0x1_0000, 0x1_8000)]));
    let seen = [Register::Generation, Register::Events, Register::Pending, Register::Spans]
        .map(|r| read(&mut core, r));
    assert_eq!(seen, [2, 4, 3, 1]);
    assert_eq!(write(&mut core, Register::Pending, 1), Effect::Nothing);
    assert_eq!(read(&mut core, Register::Pending), 2, "how much is left is another question");
}

#[test]
fn a_reset_forgets_what_the_guest_did_and_keeps_what_is_so() {
    let mut core = Core::new(FACTS, SpanSet::default());
    let _ = core.retire(&spans(&[(0, 0x1000)]));
    let _ = core.request_return();
    for (register, word) in [(Register::First, 7), (Register::Doorbell, 2)] {
        let _ = write(&mut core, register, word);
    }
    assert!(core.is_quiesced());
    let _ = core.write(TABLE.into(), &[7; 16]);
    assert_eq!(core.reset(), Effect::Nothing);
    let seen = [Register::First, Register::Status, Register::Pending, Register::Events, Register::Generation];
    assert_eq!(seen.map(|register| read(&mut core, register)), [0, 0, 4, 3, 1], "the owner still asks");
    let mut entry = [1; 16];
    core.read(TABLE.into(), &mut entry);
    assert_eq!(entry, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn a_reset_scrubs_when_the_guest_or_the_operator_asks_and_only_then() {
    let mut core = Core::new(FACTS, SpanSet::default());
    assert_eq!(core.reset(), Effect::Nothing);
    assert_eq!(write(&mut core, Register::Control, u32::MAX), Effect::Nothing);
    assert_eq!(read(&mut core, Register::Control), 1);
    assert_eq!(core.reset(), Effect::Scrub);
    assert_eq!(core.scrub_ended(true), Effect::Nothing);
    assert_eq!(core.reset(), Effect::Nothing, "once");
    let mut always = Core::new(Facts { scrub_at_reset: true, ..FACTS }, SpanSet::default());
    assert_eq!(always.reset(), Effect::Scrub);
}

#[test]
fn a_scrub_runs_alone_and_states_how_far_it_is_and_how_it_ended() {
    let mut core = Core::new(FACTS, SpanSet::default());
    assert_eq!(write(&mut core, Register::Doorbell, 1), Effect::Scrub);
    core.scrubbed(0x1000);
    assert_eq!((read(&mut core, Register::Status), read(&mut core, Register::Scrubbed)), (1, 0x1000));
    assert_eq!(core.scrub_ended(false), Effect::Nothing);
    assert_eq!(read(&mut core, Register::Status), 4);
    assert_eq!(write(&mut core, Register::Doorbell, 1), Effect::Scrub);
    assert_eq!((read(&mut core, Register::Status), read(&mut core, Register::Scrubbed)), (1, 0));
}

#[test]
fn rings_while_a_scrub_runs_are_one_more_scrub() {
    let mut core = Core::new(FACTS, SpanSet::default());
    let ring = |core: &mut Core| write(core, Register::Doorbell, 1);
    assert_eq!(ring(&mut core), Effect::Scrub);
    assert!((0..10_000).all(|_| ring(&mut core) == Effect::Nothing));
    assert_eq!(core.scrub_ended(true), Effect::Scrub);
    assert_eq!((read(&mut core, Register::Status), read(&mut core, Register::Scrubbed)), (1, 0));
    assert_eq!(core.scrub_ended(true), Effect::Nothing);
    assert_eq!((read(&mut core, Register::Status), read(&mut core, Register::Mistakes)), (0, 0));
    assert_eq!((ring(&mut core), ring(&mut core)), (Effect::Scrub, Effect::Nothing));
    assert_eq!(core.scrub_ended(false), Effect::Nothing, "none follows one that failed");
}

#[derive(Debug, Clone)]
enum Step {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Retire(u64, u64),
    Want,
    Ended(bool),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let offset = || prop_oneof![0..0x60_u64, 0..u64::from(SIZE), any::<u64>()];
    prop_oneof![
        (offset(), 0..17_usize).prop_map(|(offset, length)| Step::Read(offset, length)),
        (offset(), prop::collection::vec(0..9_u8, 0..17))
            .prop_map(|(offset, data)| Step::Write(offset, data)),
        ((0..0x70_u64), (1..0x20_u64)).prop_map(|(start, size)| Step::Retire(start << 16, size << 16)),
        Just(Step::Want),
        any::<bool>().prop_map(Step::Ended),
        Just(Step::Reset),
    ]
}

proptest! {
    #[test]
    fn whatever_a_guest_does_the_facts_stay_and_news_is_counted_right(steps in prop::collection::vec(step(), 0..80)) {
        let mut core = Core::new(FACTS, SpanSet::default());
        let mut model = SpanSet::default();
        let (mut events, mut generation) = (0, 0);
        for step in steps {
            let scrubs = read(&mut core, Register::Status) & u64::from(SCRUBS) != 0;
            match step {
                Step::Read(offset, length) => core.read(offset, &mut vec![0; length]),
                Step::Write(offset, data) => {
                    let effect = core.write(offset, &data);
                    prop_assert!(!matches!(effect, Effect::Fire(_)));
                    prop_assert!(effect != Effect::Scrub || !scrubs, "two scrubs");
                }
                Step::Retire(start, size) => {
                    let slice = Span::new(BarOffset::new(0), FACTS.size).unwrap();
                    let bad = spans(&[(start, size)]);
                    let inside = bad.iter().filter_map(|span| span.intersection(slice));
                    let grown: SpanSet<InBar> = model.iter().chain(inside).collect();
                    let fires = core.retire(&bad) == RETIRED;
                    prop_assert_eq!(fires, grown != model);
                    model = grown;
                    events += 2 * u64::from(fires);
                    generation += u64::from(fires);
                }
                Step::Want => {
                    prop_assert_eq!(core.request_return(), Effect::Fire(&[Event::Wanted]));
                    events += 1;
                }
                Step::Ended(well) => {
                    let effect = core.scrub_ended(well);
                    prop_assert!(effect == Effect::Nothing || well);
                }
                Step::Reset => {
                    let _ = core.scrub_ended(true);
                    let _ = core.reset();
                }
            }
            let facts = [Register::Magic, Register::Size, Register::Base, Register::Page, Register::Pxm];
            prop_assert_eq!(
                facts.map(|register| read(&mut core, register)),
                [u64::from(MAGIC), FACTS.size, FACTS.base, FACTS.page, 4]
            );
            prop_assert_eq!(core.retired(), &model);
            prop_assert_eq!(core.usable().size() + model.size(), FACTS.size);
            prop_assert_eq!(read(&mut core, Register::Events), events);
            prop_assert_eq!(read(&mut core, Register::Generation), generation);
        }
    }
}
