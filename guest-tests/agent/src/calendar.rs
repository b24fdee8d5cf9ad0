//! The time of day in UTC, from the kernel's count of seconds.

/// Seconds of a day.
const DAY: u64 = 86_400;

/// The time now: `2026-11-22T13:00:00Z`.
pub(crate) fn now() -> String {
    utc(std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()))
}

/// The time `seconds` after the beginning of 1970.
fn utc(seconds: u64) -> String {
    let (mut days, rest) = (seconds / DAY, seconds % DAY);
    let mut year = 1970;
    loop {
        let length = if is_leap(year) { 366 } else { 365 };
        if days < length || year == 9999 {
            break;
        }
        days -= length;
        year += 1;
    }
    let mut month = 1;
    for length in [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let day = days.min(30) + 1;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

const fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_795_352_399, "2026-11-22T12:59:59Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
        assert!(utc(u64::MAX).starts_with("9999-"));
    }
}
