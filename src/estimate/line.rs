//! Times that are measured at two sizes and estimated at others.

/// A time that grows linearly with x: `base + slope x`.
#[derive(Clone, Copy)]
pub struct Line {
    /// Seconds at x = 0.
    pub base: f64,
    /// Seconds per unit of x.
    pub slope: f64,
}

impl Line {
    /// Returns the line through two times; if noise would make it fall, or start below zero, it is made flat or starts
    /// at zero. A time may be a difference of two measured ones: if noise made it negative, it counts as zero.
    pub fn through([x0, x1]: [f64; 2], times: [f64; 2]) -> Self {
        let [t0, t1] = times.map(|time| time.max(0.0));
        let slope = ((t1 - t0) / (x1 - x0)).clamp(0.0, t1 / x1);
        Self {
            base: t1 - slope * x1,
            slope,
        }
    }

    /// Returns the time at `x`.
    pub fn at(self, x: f64) -> f64 {
        self.base + self.slope * x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_pass_through_what_was_measured() {
        let line = Line::through([64.0, 512.0], [2.0, 9.0]);
        assert!((line.at(64.0) - 2.0).abs() < 1e-9 && (line.at(512.0) - 9.0).abs() < 1e-9);
        // With noise, a line neither falls nor starts below zero.
        assert_eq!(Line::through([1.0, 2.0], [5.0, 4.0]).at(9.0), 4.0);
        assert_eq!(Line::through([1.0, 2.0], [1.0, 4.0]).at(4.0), 8.0);
        assert_eq!(Line::through([1.0, 2.0], [-1.0, -0.5]).at(4.0), 0.0);
        assert_eq!(Line::through([1.0, 2.0], [-1.0, 4.0]).at(4.0), 8.0);
    }
}
